"""The command `preprocess_data.py`: from files of records to indexed files of token ids."""
