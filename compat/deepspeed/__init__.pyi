from ...data.dataloader import RepeatingLoader as RepeatingLoader
from . import accelerator as accelerator
from . import checkpointing as checkpointing
from . import comm as comm
from . import moe as moe
from . import utils as utils
from . import zero as zero
from .accelerator import get_accelerator as get_accelerator
from .arguments import add_config_arguments as add_config_arguments
from .arguments import init_distributed as init_distributed
from .configuration import DeepSpeedConfig as DeepSpeedConfig
from .context import initialize as initialize
from .engine import DeepSpeedConfigError as DeepSpeedConfigError
from .engine import DeepSpeedEngine as DeepSpeedEngine
from .engine import DeepSpeedPipelineEngine
from .inference import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
from .inference import DeepSpeedInferenceEngine
from .inference import default_inference_config as default_inference_config
from .inference import init_inference as init_inference
from .inference import tp_model_init as tp_model_init
from .modules import install as install
from .pipeline_arguments import DeepSpeedPipelineModule
from .utils import OnDevice as OnDevice
from .utils import log_dist as log_dist
from .utils import logger as logger

PipelineEngine = DeepSpeedPipelineEngine
PipelineModule = DeepSpeedPipelineModule
InferenceEngine = DeepSpeedInferenceEngine

__version__: str
