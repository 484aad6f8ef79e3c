from ...data.dataloader import RepeatingLoader as RepeatingLoader
from ...engine.module_engine import ModuleEngine as ModuleEngine
from ...engine.pipeline_engine import PipelineEngine as PipelineEngine
from ...grid.errors import ConfigError as ConfigError
from ...pipe.module import PipelineModule as PipelineModule
from . import comm as comm
from . import moe as moe
from . import zero as zero
from .arguments import add_config_arguments as add_config_arguments
from .arguments import init_distributed as init_distributed
from .context import initialize as initialize
from .modules import install as install

DeepSpeedEngine = ModuleEngine
DeepSpeedConfigError = ConfigError

__version__: str
