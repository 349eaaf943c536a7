# For Spack 1.0 and newer.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyQsgdHpc(PythonPackage):
    """Data-parallel training with 4 to 16 times fewer gradient bytes: QSGD allreduce over MPI, the
    Horovod API, batch jobs and scaling studies."""

    pypi = "qsgd-hpc/qsgd_hpc-0.1.0.tar.gz"

    license("Apache-2.0")

    # The checksum is that of the sdist in SHA256SUMS of the release.
    version("0.1.0")

    variant("cuda", default=False, description="Compile the GPU kernels")

    depends_on("cxx", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-pybind11@3", type="build")
    depends_on("cuda", when="+cuda")

    # Any MPI: the core is compiled against none. mpi4py is what finds it.
    depends_on("mpi", type="run")
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-cloudpickle@3:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-jsonschema@4.20:", type=("build", "run"))
    depends_on("py-libcst@1.5:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"))
    depends_on("py-numpy@1.23:", type=("build", "run"))
    depends_on("py-pandas@2:", type=("build", "run"))
    depends_on("py-pyyaml@6:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-scipy@1.9:", type=("build", "run"))

    # GCC 7 has no vector AES.
    conflicts("%gcc@:7")

    def setup_build_environment(self, env):
        env.set("QSGD_TARGET", "native")
        env.set("QSGD_GPU", "cuda" if self.spec.satisfies("+cuda") else "none")
