"""How many threads the Rust library of tokenizers uses."""

import os


def limit_threads(number: int) -> None:
    """Encode batches on `number` threads in this process; children inherit it. Call it before the first batch: the
    library starts its threads once, and reads only whether to use them each time.
    """
    os.environ["RAYON_NUM_THREADS"] = str(number)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if number > 1 else "false"
