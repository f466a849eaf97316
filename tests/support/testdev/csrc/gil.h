// The host must not hold Python's lock while it waits: a stream may run an operator in Python.

#pragma once

#include <Python.h>

namespace testdev {

template <typename Function>
void without_gil(Function function) {
  if (!Py_IsInitialized() || !PyGILState_Check()) {
    function();
    return;
  }
  PyThreadState* state = PyEval_SaveThread();
  try {
    function();
  } catch (...) {
    PyEval_RestoreThread(state);
    throw;
  }
  PyEval_RestoreThread(state);
}

}  // namespace testdev
