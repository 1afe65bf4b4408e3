// The extension `baton_router`: its types, each with a file of its own.
#include "python_face.h"

PyObject* make_page_table_type();
PyObject* make_kv_prices_type();

namespace {

bool add(PyObject* module, const char* name, PyObject* type) {
  if (!type) return false;
  const bool added = PyModule_AddObjectRef(module, name, type) == 0;
  Py_DECREF(type);
  return added;
}

int fill(PyObject* module) {
  return add(module, "PageTable", make_page_table_type()) && add(module, "KVPrices", make_kv_prices_type()) ? 0 : -1;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "baton_router", nullptr, 0, nullptr, module_slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_baton_router() { return PyModuleDef_Init(&definition); }
