from ...data.dataloader import RepeatingLoader as RepeatingLoader
from . import comm as comm
from . import moe as moe
from . import zero as zero
from .arguments import add_config_arguments as add_config_arguments
from .arguments import init_distributed as init_distributed
from .context import initialize as initialize
