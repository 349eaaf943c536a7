// Ownership in Python of a core object that has threads.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace qsgd {

// Deleter: releases the GIL, because the object's threads may need it to log while the destructor
// waits for them; a framework's thread that releases the object does not hold it. A forked child
// has the object without its threads, and would wait forever: it does not delete it.
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
