"""Run a captured step under the engine's modes in lock-step and compare with one device."""

import sys
import time
import torch
import copy, collections
from spmd.lifting import lift
from spmd.capture import capture
from spmd.lockstep import run_lockstep, PerRank
from spmd.parallel_mode import *
from spmd.mesh import MeshShape
from spmd.layout import local_shape, Shard, Partial
def take(x, layout, coord):
    for p,c in zip(layout.placements, coord):
        if isinstance(p, Shard):
            d=p.dim
            y=x.reshape(*x.shape[:d], p.outer, sum(p.units), *x.shape[d+1:])
            s=sum(p.units[:c]); y=y.narrow(d+1,s,p.units[c])
            x=y.reshape(*x.shape[:d], p.outer*p.units[c], *x.shape[d+1:])
    return x
def check(make, mkopt, step, batch, ranks=(4,), tol=1e-11, modes=None, verbose=True):
    torch.manual_seed(0)
    m=make(); opt=mkopt(m.parameters())
    rs=torch.get_rng_state()
    if opt.__class__.__name__ != 'SGD': step(m,opt,*batch)
    w=lift(step,(m,opt,*batch),{})
    t=time.time()
    p=capture(step,w,lambda i: w.values[i].detach().clone() if isinstance(w.values[i],torch.Tensor) else torch.tensor(w.values[i],dtype=torch.float64)); dt=time.time()-t
    g=p.graph; sig=g.meta['signature']; n=len(g.graph.nodes)
    vals=[v.detach().clone() if isinstance(v,torch.Tensor) else torch.tensor(v,dtype=torch.float64) for v in w.values]+[c.detach() for c in p.captured]
    rng=torch.get_rng_state()
    ref=g(*[v.clone() for v in vals])
    torch.set_rng_state(rng)
    m2=m; step(m2,opt,*batch)
    params=dict(m2.named_parameters())
    worst=0
    for o,r in zip(sig.outputs,ref):
        if o.kind=='parameter' and o.name in params:
            worst=max(worst,(params[o.name].detach()-r).abs().max().item() if r.numel() else 0)
    if verbose: print(f'nodes {n} capture {dt*1e3/n:.2f} ms/node; graph vs eager {worst:.2e}')
    for W in ranks:
      for name in (modes or ['replicate','fully_shard','default','expand']):
        mesh=MeshShape(('dp',),(W,))
        mode=DTensorExpandMode(mesh=mesh) if name=='expand' else DataParallel(name,mesh=mesh)
        t=time.time(); lg=mode.partition(g,m,opt,{},{},(),{}); lg=mode.transform_and_compile(lg); dt=time.time()-t
        ins=[]
        for v,l in zip(vals, lg.meta['layouts']['inputs']):
            ins.append(v if l.is_replicated else PerRank(take(v,l,c).clone() for c in mesh.coordinates()))
        torch.set_rng_state(rng)
        t=time.time()
        outs=run_lockstep(lg,ins,mesh); rt=time.time()-t
        worst=(0,'')
        for o,r,v,l in zip(sig.outputs,ref,outs,lg.meta['layouts']['outputs']):
            if not isinstance(r,torch.Tensor): continue
            for i,c in enumerate(mesh.coordinates()):
                lv=v[i] if isinstance(v,PerRank) else v
                e=take(r,l,c)
                if lv.shape!=e.shape: print('SHAPE',o,lv.shape,e.shape,l); continue
                if e.numel():
                    if e.is_floating_point() or e.is_complex():
                        d=(lv-e).abs().max().item()/max(1e-3,e.abs().max().item())
                    else: d=float((lv!=e).any())
                    if not d<=worst[0]: worst=(d,str(o))
        cols=collections.Counter(str(nn_.target).split('.')[1] for nn_ in lg.graph.nodes if '_c10d' in str(nn_.target) and 'wait' not in str(nn_.target))
        if verbose or not worst[0]<tol: print(f'  {name:12s} W={W} part {dt*1e3/n:.2f} ms/node run {rt*1e3:.0f}ms local {len(lg.graph.nodes)} worst {worst[0]:.1e} {worst[1] if not worst[0]<tol else ""} fallbacks {lg.meta["fallbacks"]} {dict(cols)}')
    return g, lg
