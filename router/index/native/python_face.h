// What every Python type of this extension needs: arguments, buffers, errors.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <new>

namespace baton {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// An object's memory, while this lives.
class Buffer {
 public:
  Buffer(PyObject* object, int flags) : there_(PyObject_GetBuffer(object, &view_, flags) == 0) {}
  ~Buffer() {
    if (there_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  explicit operator bool() const { return there_; }
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_;
  bool there_;
};

// Thrown where Python's error is set already.
struct Raised {};

// Calls `work`, with its C++ exceptions as Python's. Returns nullptr when it threw.
template <typename Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Each of these sets Python's error when it returns false.
inline bool check(bool fine, const char* rule) {
  if (!fine) PyErr_SetString(PyExc_ValueError, rule);
  return fine;
}

inline bool check_count(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, given);
  return given == wanted;
}

inline bool parse(PyObject* argument, uint32_t most, const char* rule, uint32_t& value) {
  const long number = PyLong_AsLong(argument);
  if (number == -1 && PyErr_Occurred()) return false;
  value = static_cast<uint32_t>(number);
  return check(number >= 0 && number <= static_cast<long>(most), rule);
}

}  // namespace baton
