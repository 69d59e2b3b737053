"""Small environments and a reward function to start from; ``orhpc init`` copies them.

``one_turn`` answers a question, ``tools`` reaches a goal with tool calls, ``end_state`` is rewarded for the
state that it has reached; ``reward`` changes the reward of a rollout.
"""
