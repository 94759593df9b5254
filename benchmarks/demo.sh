#!/usr/bin/env bash
# `make demo`: Python's standard library as a knowledge graph, from source files to a prediction.
# The commands are those for your own data. All output goes to demo/.
set -euo pipefail
cd "$(dirname "$0")/.."

demo=demo
run=$demo/run
step() { printf '\n== %s\n' "$*"; }

step "1. read the standard library's source: triples (head, relation, tail)"
rm -rf "$run"
python benchmarks/stdlib_kg.py --output $demo/stdlib-triples

step "2. convert the triples to a data set with DGL partitions"
python partition_tools/partition.py --input $demo/stdlib-triples \
    --entity-types $demo/stdlib-triples/entity_types.tsv --output $demo/stdlib --num-parts 1 --overwrite

step "3. train and evaluate: one server and two trainers on this machine"
dglkge-launch --ip-config ip_config.txt --num-servers 1 --num-trainers 2 --log-dir $run/logs \
    examples/train.py --config dglkge/config/recipes/stdlib/complex.yaml

# A class whose base class is only in the test split: training has not used the answer.
read -r class relation base < <(grep -P '\tinherits_from\t' $demo/stdlib-triples/test.tsv | head -n 1)
step "4. what does $class inherit from? (in truth $base, which was held out)"
dglkge predict $run --head "$class" --relation "$relation" -k 5

step "results"
cat <<END
  triples       $demo/stdlib-triples/   train, valid and test; entity types; summary.json
  data set      $demo/stdlib/           ids, vocabularies and the DGL partition
  run           $run/               config.json, stats.jsonl, metrics.json, logs/
  checkpoint    $run/checkpoint/    HDF5 in PyTorch-BigGraph's layout
  next          dglkge checkpoint inspect $run
END
