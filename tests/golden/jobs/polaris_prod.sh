#!/bin/bash -l
#PBS -N train_resnet34
#PBS -A myproject
#PBS -q prod
#PBS -l select=64:system=polaris
#PBS -l place=scatter
#PBS -k doe
#PBS -l walltime=05:00:00
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

mpiexec -n 256 --ppn 4 --depth=8 --cpu-bind depth \
    --env CUDA_VISIBLE_DEVICES=3,2,1,0 \
    --env OMP_NUM_THREADS=8 \
    --env TMPDIR=/tmp \
    python /eagle/myproject/me/run/train_resnet34.py --epochs 3
