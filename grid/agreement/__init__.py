"""Agreement of all ranks: sums and facts, errors raised on every rank, and the rank to blame where they cannot agree.

agreement.py: sums over all ranks, equality of facts, errors raised on every rank.
failure.py: the context of each step: has the grid start the hang watch; a rank that fails leaves the process group.
call_order.py: ranks that make the same collective calls in the same order, or an error on all of them.
hang_watch.py: finds the rank that hangs, with its op and line; ``Grid.start_hang_watch`` starts it.
mailbox.py: texts that any rank posts for rank 0, without a collective.
store_barrier.py: a barrier through the store, with a limit.
"""
