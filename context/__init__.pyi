from .order import gather as gather
from .order import positions as positions
from .order import shard as shard
from .order import unshard as unshard
