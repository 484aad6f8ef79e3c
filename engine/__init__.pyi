from ..config.schema import Config as Config
from ..grid.errors import ConfigError as ConfigError
from .engines import Engine as Engine
from .initialize import read_config as read_config
from .pipeline_engine import PipelineEngine as PipelineEngine
