"""Mixture of experts: layers whose tokens go to a few of many MLPs, which are sharded over the expert axis.

layer.py: ``MoE``, the layer.
router.py: the choice of the experts of each token, and their weights.
capacity.py: limit of an expert's tokens per sequence.
dispatch.py: tokens to the ranks of their experts and back, by all-to-all.
lending.py: experts that idle ranks borrow from busy ones.
grouped.py: grouped product, the rows of each expert times its matrix.
experts.py: the experts' weights and MLPs, and the shared experts.
module_experts.py: ``ModuleMoE``, a mixture of copies of any module, which returns its load-balancing loss.
balance.py: auxiliary losses and the bias that balance the experts' loads.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
