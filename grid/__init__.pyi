from .comm.axis import Axis as Axis
from .comm.pending import Pending as Pending
from .environment import Environment as Environment
from .environment import read_environment as read_environment
from .grid import Grid as Grid
from .layout import Box as Box
from .layout import Layout as Layout
from .layout import layout_of as layout_of
from .layout import set_layout as set_layout
from .ranges import split as split
from .topology import Topology as Topology

VERSION: str
