// How Python holds an object of the core that has threads of its own.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace qsgd {

// Its threads may wait for the GIL, to log, while its destructor waits for them; a framework's
// thread that lets the object go has no GIL. A forked child has the object without its threads, and
// would wait for ever.
template <class T>
struct DeleteWhereMade {
  pid_t owner = getpid();

  void operator()(T* object) const {
    if (getpid() != owner) return;
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const pybind11::gil_scoped_release no_gil;
    delete object;
  }
};

template <class T>
using Threaded = std::unique_ptr<T, DeleteWhereMade<T>>;

}  // namespace qsgd
