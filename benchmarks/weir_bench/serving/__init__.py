"""Speed of serving, measured side by side: ours and its rivals on the same machine, weights and work, in one run.

    PYTHONPATH=benchmarks python -m weir_bench.serving [TABLE …] [--full] [--llama FOLDER] [--traces FOLDER]

How a figure comes about, whatever the table:

- each server is a child of the run on a loopback port; it is warmed up, and all of a table's are up while it is measured;
- servers take turns, A B A B, cell by cell, so that a pair of neighbours saw the same machine; ratios are taken pair by pair;
- each cell reads the server's own counters: one that was given n clients and did not batch ends the run;
- the generator watches itself (lag of its loop, its CPU): it has one of the machine's cores, and the raw data says how much;
- roofs of memory and arithmetic are measured in the same run, before and after every cell.
"""
