"""Post-training: losses on any grid, and the data that they take.

preferences.py: ``preference_loss``: DPO, IPO, SimPO and ORPO for pairs of a better and a worse answer.
reference.py: ``with_reference``: log-probabilities of the answers by the model as it is now.
policy.py: ``grpo_loss``: GRPO, DAPO, Dr. GRPO and GSPO for drawn answers with advantages.
rewards.py: users' reward functions, called once for the job, and advantages.
rollouts.py: ``Rollouts``: answers drawn on the training grid, with rewards, as microbatches.
rowwise.py: ``exact_rows``: each token computed alone, so that recorded log-probabilities have the trainer's bits.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
