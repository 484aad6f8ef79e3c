from ..config.schema import Config as Config
from ..grid.errors import ConfigError as ConfigError
from .base import Engine as Engine
from .pipeline_engine import PipelineEngine as PipelineEngine
from .setup.check import read_config as read_config
