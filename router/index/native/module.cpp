// The extension `baton_router`: its types, each with a file of its own, and one function.
#include "python_face.h"

#include <algorithm>

PyObject* make_page_table_type();
PyObject* make_kv_prices_type();

namespace {

// project(figures, now): the queues of a whole fleet, as router/placement/fleet.py has them: float64 [7, workers].
PyObject* project(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!baton::check_count(given, 2)) return nullptr;
  const baton::Buffer figures(args[0], PyBUF_ND | PyBUF_WRITABLE);
  const double now = PyFloat_AsDouble(args[1]);
  if (!figures || PyErr_Occurred()) return nullptr;
  const bool rows = figures->ndim == 2 && figures->itemsize == 8 && figures->shape[0] == 7;
  if (!baton::check(rows, "figures are float64 [7, workers]")) return nullptr;
  const Py_ssize_t workers = figures->shape[1];
  double* const queued = static_cast<double*>(figures->buf);
  const double *base = queued + 4 * workers, *rate = queued + 5 * workers, *since = queued + 6 * workers;
  for (Py_ssize_t row = 0; row < workers; ++row)
    queued[row] = std::max(base[row] - rate[row] * now, 0.0) + since[row];
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"project", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(project)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool add(PyObject* module, const char* name, PyObject* type) {
  if (!type) return false;
  const bool added = PyModule_AddObjectRef(module, name, type) == 0;
  Py_DECREF(type);
  return added;
}

int fill(PyObject* module) {
  const bool all = add(module, "PageTable", make_page_table_type()) && add(module, "KVPrices", make_kv_prices_type());
  return all ? 0 : -1;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "baton_router", nullptr, 0, functions, module_slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_baton_router() { return PyModuleDef_Init(&definition); }
