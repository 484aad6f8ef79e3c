from .gathered_parameters import gathered as gathered
from .modules.leaf_modules import set_leaf_modules as set_leaf_modules
from .modules.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from .modules.units import register_external_parameter as register_external_parameter
