"""Small environments and a reward function to start from; ``orhpc init`` copies them.

``one_turn`` answers a question, ``tools`` works towards a goal with tool calls, ``end_state`` is paid for
what it has made when it says that it is done; ``reward`` changes what a rollout is worth.
"""
