import time,sys
t0=time.perf_counter()
