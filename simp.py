import sys; sys.argv=['x',sys.argv[1],sys.argv[2],'1']
src=open('/work/scratch/plan/p2/simb.py').read().split('best=9')[0]
exec(src)
import cProfile,pstats
pr=cProfile.Profile(); pr.enable()
for pl,po,b,r in rows: o(pl,po,b)
pr.disable(); pstats.Stats(pr).strip_dirs().sort_stats('tottime').print_stats(22)
