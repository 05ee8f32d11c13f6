"""A gateway and a picker under everything at once for a long time: does anything grow, is anything left behind?

run.py      `python -m tests.soak.run --seconds 1800`: cycles of load and rest, judged at the end
watched.py  the processes, seen from outside (memory, descriptors) and asked from inside (tasks, objects)
clients.py  what clients do, also those that leave, lie or ask for what there is not
picks.py    the same for a proxy that asks the picker
troubles.py what happens to engines meanwhile
"""
