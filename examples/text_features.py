"""Text embeddings as features of entities: new entities are ranked without training.

    pip install scikit-learn
    python examples/text_features.py examples/countries.csv runs/texts

The texts here are the entities' names; take descriptions, and a sentence encoder in place of TF-IDF.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import dglkge


def main(csv: str, output: str) -> None:
    """Train a projection of text vectors, and ask for an entity that training has not seen."""
    frame = pd.read_csv(csv)
    names = pd.unique(pd.concat([frame["head"], frame["tail"]]))
    encoder = make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4)),
        TruncatedSVD(16, random_state=0),
        Normalizer(),
    )
    vectors = Path(output + "-vectors.parquet")
    embedding = encoder.fit_transform(names).astype(np.float32)
    vectors.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"name": names, "embedding": list(embedding)}).to_parquet(vectors)

    settings = {
        "features.files": [str(vectors)],
        "features.use": "alone",  # or added, to trained rows
        "training.num_epochs": 50,
        "training.batch_size": 50,
        "model.dimension": 64,
        "dense.lr": 0.01,
    }
    run = dglkge.train(frame, "complex", output=output, settings=settings)
    new = "New Belgium"
    with_new = run.with_new_entities([new], encoder.transform([new]).astype(np.float32))
    print(with_new.predict_tails(new, str(frame["relation"].iloc[0]), k=5))


if __name__ == "__main__":
    main(*sys.argv[1:])
