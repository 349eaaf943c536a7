#!/bin/bash
#SBATCH --job-name=hostile
#SBATCH --account=m1234_g
#SBATCH --qos=debug
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=4
#SBATCH --constraint=gpu
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=00:30:00

cd -- "${SLURM_SUBMIT_DIR:?}" || exit 1
export OMP_NUM_THREADS=16
export MPICH_OFI_NIC_POLICY=GPU
export GREETING='say "hi" $USER
`id`'

srun -n 32 --ntasks-per-node=4 -c 32 --cpu-bind=cores --gpus-per-node=4 --gpu-bind=none \
    env CUDA_VISIBLE_DEVICES=3,2,1,0 \
    python '/eagle/myproject/me/run/it'"'"'s a $(rm -rf ~) "scrípt".py' '' 'a b' '`id`' '$HOME' 'line
break' --nodes ''"'"'' '\' '日本'
