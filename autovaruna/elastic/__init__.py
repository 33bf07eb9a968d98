"""Training that goes on when hosts come and go.

manager    one: hosts, events, starts of the job
keeper     one a host, outside of mpirun: what ranks leave in memory, and copies of another host's
standby    one a host: has everything imported, is forked to become a rank
stub       one a rank: what mpirun starts
"""
