import sys, time
from simulator.scenario import draw
from simulator.simulation import simulate
a,b=int(sys.argv[1]),int(sys.argv[2])
t=time.perf_counter()
for s in range(a,b):
    t0=time.perf_counter(); r=simulate(draw(s))
    if r.violations or len(sys.argv)<4: print(s, r.requests, r.faults, r.tokens, r.messages, f"{r.virtual_seconds:.1f}", f"{time.perf_counter()-t0:.2f}", dict(r.ends), r.digest[:8], r.violations[:3], flush=True)
print("total", time.perf_counter()-t)
