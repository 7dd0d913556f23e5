"""What a run will need, found out without running it (`train_fsdp2.py --check`)."""
