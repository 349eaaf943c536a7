// MPI without mpi.h: its functions are taken from the library that mpi4py has loaded, so one binary
// serves every MPI. Only the type of a handle differs: int for MPICH and its derivatives (Cray
// MPICH, Intel MPI, MVAPICH), a pointer for Open MPI and the standard ABI of MPI 5.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace qsgd {

// Information from mpi4py; handles are passed as integers.
struct MpiFacts {
  std::string module_path;  // the loaded extension, whose dependencies have the MPI functions
  std::string library;      // MPI_Get_library_version, for messages
  bool pointer_handles;
  std::uintptr_t comm;       // a communicator used only by this package, with errors returned
  std::uintptr_t byte_type;  // MPI_BYTE
  int rank;
  int size;
};

std::unique_ptr<Transport> make_mpi_transport(const MpiFacts& facts);

}  // namespace qsgd
