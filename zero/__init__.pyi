from .compression.powersgd import PowerSGD as PowerSGD
from .compression.sparse_rows import SparseRows as SparseRows
from .compression.topk import TopK as TopK
from .gathered_parameters import gathered as gathered
from .modules.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from .onebit.adam import OneBitAdam as OneBitAdam
from .onebit.adam import ZeroOneAdam as ZeroOneAdam
from .onebit.lamb import OneBitLamb as OneBitLamb
