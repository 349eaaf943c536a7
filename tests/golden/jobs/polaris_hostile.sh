#!/bin/bash -l
#PBS -N hostile
#PBS -A myproject
#PBS -q debug-scaling
#PBS -l select=8:system=polaris
#PBS -l place=scatter
#PBS -k doe
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -j oe

cd -- "${PBS_O_WORKDIR:?}" || exit 1
module use /soft/modulefiles
module load conda
conda activate base
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128
export CUDA_VISIBLE_DEVICES=3,2,1,0
export OMP_NUM_THREADS=8
export TMPDIR=/tmp
export GREETING='say "hi" $USER
`id`'

mpiexec -n 32 --ppn 4 --depth=8 --cpu-bind depth \
    --env CUDA_VISIBLE_DEVICES=3,2,1,0 \
    --env OMP_NUM_THREADS=8 \
    --env TMPDIR=/tmp \
    --env 'GREETING=say "hi" $USER
`id`' \
    python '/eagle/myproject/me/run/it'"'"'s a $(rm -rf ~) "scrípt".py' '' 'a b' '`id`' '$HOME' 'line
break' --nodes ''"'"'' '\' '日本'
