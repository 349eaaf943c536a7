-- For Lmod: qsgd-hpc in a virtual environment of the site's, beside whatever MPI is loaded.
--   python3 -m venv /opt/apps/qsgd-hpc/0.1.0
--   /opt/apps/qsgd-hpc/0.1.0/bin/pip install qsgd_hpc-0.1.0-*.whl
help([[Data-parallel training with fewer gradient bytes; `qsgd-hpc doctor` looks at everything.]])
whatis("Name: qsgd-hpc")
whatis("Version: 0.1.0")
whatis("Description: QSGD allreduce over MPI, the Horovod API, batch jobs, scaling studies")

local root = pathJoin("/opt/apps/qsgd-hpc", myModuleVersion())

conflict("qsgd-hpc")
-- The MPI of the site comes from its own module, and no environment of ours has another.
prepend_path("PATH", pathJoin(root, "bin"))
setenv("QSGD_HPC_ROOT", root)
