from ...data.dataloader import RepeatingLoader as RepeatingLoader
from ...pipe.module import PipelineModule as PipelineModule
from . import comm as comm
from . import moe as moe
from . import zero as zero
from .arguments import add_config_arguments as add_config_arguments
from .arguments import init_distributed as init_distributed
from .context import initialize as initialize
from .engine import DeepSpeedConfigError as DeepSpeedConfigError
from .engine import DeepSpeedEngine as DeepSpeedEngine
from .engine import DeepSpeedPipelineEngine
from .modules import install as install

PipelineEngine = DeepSpeedPipelineEngine

__version__: str
