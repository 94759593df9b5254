#!/usr/bin/env bash
# Two machines, from a file of triples to predictions:
#   bash examples/two_machines.sh facts.tsv my_cluster.txt
# my_cluster.txt has the address of each machine on a line of its own. Both have dglkge at the same path, and the
# first reaches the second by SSH without a password. Run the same command again to resume.
set -euo pipefail
triples=$1
machines=$2
data=data/two-machines
run=runs/two-machines

# A partition for each machine; METIS keeps the triples that join both few.
[ -d "$data" ] || dglkge data build --input "$triples" --split 0.9,0.05,0.05 --output "$data" --num-parts 2

# --sync sends each machine its partition, and the run is written here: leave it out where both mount one disk.
dglkge-launch --ip-config "$machines" --sync --workspace /tmp/dglkge-job --max-restarts 3 \
    examples/train.py --set dataset="$data" --set output="$run" --set training.num_epochs=20

# The result is here; no cluster is needed to use it.
dglkge evaluate "$run" --by relation
