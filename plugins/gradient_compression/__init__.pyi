from .onebit.adam import OneBitAdam as OneBitAdam
from .onebit.adam import ZeroOneAdam as ZeroOneAdam
from .onebit.lamb import OneBitLamb as OneBitLamb
from .onebit.sgd import OneBitSGD as OneBitSGD
from .powersgd import PowerSGD as PowerSGD
from .sparse_rows import SparseRows as SparseRows
from .topk import TopK as TopK
