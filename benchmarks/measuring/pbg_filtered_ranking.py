"""Filtered ranking by PyTorch-BigGraph itself; runs in its environment: CONFIG TEST FILTER [FILTER ...]."""

from __future__ import annotations

import sys


def main() -> None:
    """Rank the test edges against all entities, other known answers left out (as its FB15k example does)."""
    # Inside the function: the benchmark's own environment has no PyTorch-BigGraph.
    import attr
    from torchbiggraph.config import ConfigFileLoader, add_to_sys_path
    from torchbiggraph.eval import do_eval
    from torchbiggraph.filtered_eval import FilteredRankingEvaluator
    from torchbiggraph.util import SubprocessInitializer, setup_logging

    setup_logging()
    path, test, *filters = sys.argv[1:]
    loader = ConfigFileLoader()
    config = loader.load_config(path)
    # All entities are candidates; its default samples them.
    relations = [attr.evolve(relation, all_negs=True) for relation in config.relations]
    config = attr.evolve(config, edge_paths=[test], relations=relations, num_uniform_negs=0)
    initializer = SubprocessInitializer()
    initializer.register(setup_logging, config.verbose)
    initializer.register(add_to_sys_path, loader.config_dir.name)
    do_eval(
        config,
        evaluator=FilteredRankingEvaluator(config, [test, *filters]),
        subprocess_init=initializer,
    )


if __name__ == "__main__":
    main()
