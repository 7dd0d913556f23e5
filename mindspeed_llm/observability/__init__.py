"""What a run tells its user: log lines, metrics.jsonl, loss.png, TensorBoard, throughput, progress, profiles.

Used by both trainers. It knows no device and no other package of ours: figures such as memory and device name are
handed in. Importing the package itself imports nothing.
"""
