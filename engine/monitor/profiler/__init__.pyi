from .flops import FlopsProfiler as FlopsProfiler
from .flops import get_model_profile as get_model_profile
