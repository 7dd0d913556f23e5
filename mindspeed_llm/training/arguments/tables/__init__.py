"""All flags of a training run, in the order of `--help`."""

from mindspeed_llm.flag import Group
from mindspeed_llm.training.arguments.tables.data import DATA, TOKENIZER
from mindspeed_llm.training.arguments.tables.features import DOCUMENTS
from mindspeed_llm.training.arguments.tables.finetune import FINETUNE
from mindspeed_llm.training.arguments.tables.model import ATTENTION, LAYERS, POSITIONS, SIZES
from mindspeed_llm.training.arguments.tables.moe import DISPATCH, EXPERTS, ROUTER
from mindspeed_llm.training.arguments.tables.optimizer import BATCH, LEARNING_RATE, OPTIMIZER, PRECISION
from mindspeed_llm.training.arguments.tables.output import CHECKPOINT, EVALUATION, INSTEAD, LOGS
from mindspeed_llm.training.arguments.tables.parallel import DATA_PARALLEL, PARALLEL
from mindspeed_llm.training.arguments.tables.preference import PREFERENCE
from mindspeed_llm.training.arguments.tables.recompute import RECOMPUTE

OF_MODEL: tuple[Group, ...] = (SIZES, ATTENTION, POSITIONS, LAYERS, EXPERTS, ROUTER, DISPATCH, PARALLEL)
"""What describes a model and its spread over ranks, for every command."""

TRAINING: tuple[Group, ...] = (
    *OF_MODEL,
    DATA_PARALLEL,
    BATCH,
    OPTIMIZER,
    LEARNING_RATE,
    PRECISION,
    RECOMPUTE,
    DATA,
    TOKENIZER,
    FINETUNE,
    PREFERENCE,
    CHECKPOINT,
    EVALUATION,
    LOGS,
    INSTEAD,
)

OF_FEATURES: tuple[Group, ...] = (DOCUMENTS,)
"""Until the features register them."""
