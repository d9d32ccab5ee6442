"""Steps over meshes of real processes on this machine, one file per study.

python -m benchmarks.shards exact       five nets on four meshes against one process, in float64
python -m benchmarks.shards memory      peak per worker of a 2 x 2 mesh over that of one process
python -m benchmarks.shards budgets     peak and time of each worker within budgets below its baseline
python -m benchmarks.shards scaling     a batch of one per worker, on one and on two workers
python -m benchmarks.shards calibrate   a machine file from workers here, and how far projections are off
python -m benchmarks.shards parameters  GPT-2 small with sharded parameters, beside FSDP2 (--fsdp)
python -m benchmarks.shards elastic     sharded parameters over 20 random changes of the number of workers
python -m benchmarks.shards faults --kills 20 --stops 4 --cuts 2 --plants     workers lost at random moments
python -m benchmarks.shards faults --sharded                the same with sharded parameters and state
"""
