from ..base.errors import ConfigError as ConfigError
from .engines import Engine as Engine
from .pipeline_engine import PipelineEngine as PipelineEngine
