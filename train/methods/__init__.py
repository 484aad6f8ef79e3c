"""Post-training: losses on any grid, and the data that they take.

answer_losses.py: ``AnswerLoss``: what losses of whole answers share.
preferences.py: ``preference_loss``: DPO, IPO, SimPO and ORPO for pairs of a better and a worse answer.
kto.py: ``kto_loss``: KTO for answers that are each desirable or not.
reward.py: ``reward_loss``: a score of an answer, learned from such pairs; the model is models/reward.py's.
reference.py: ``with_reference``, ``with_baseline``, ``row_log_probs``: log-probabilities by the model as it is now.
distillation.py: ``distill_loss``: a student learns a teacher's distribution of the next token.
teacher.py: ``with_teacher``: a teacher's distributions, by a second model on the same grid.
remote_teacher.py: ``RemoteTeacher`` and ``serve_teacher``: a teacher in other processes, on a grid of its own.
grpo.py: ``grpo_loss``: GRPO, DAPO, Dr. GRPO and GSPO for drawn answers with advantages.
rewards.py: users' reward functions, called once for the job, and advantages.
rollouts.py: ``Rollouts``: answers drawn on the training grid, with rewards, as microbatches.
rowwise.py: ``exact_rows``: each token computed alone, so that recorded log-probabilities have the trainer's bits.
"""

from ...base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
