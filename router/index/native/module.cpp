// The extension module `baton_router` and its one class, PageTable, as router/index/page_table.py describes it.
//
// `apply`, `clear` and `held` release the GIL while they work, so that a flood of events does not hold up the event
// loop. `find`, `store` and `remove` keep it: they take microseconds, and to get the GIL back from a busy thread can
// take 5 ms. This cannot deadlock, because nothing takes the GIL while it holds the table's mutex.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <new>
#include <random>

#include "page_table.h"

namespace {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The memory of a Python object, held until the end of this object's life.
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

// Calls `work` and turns its C++ exceptions into Python's. Returns nullptr when it threw.
template <typename Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Each of these sets Python's error when it returns false.
bool check(bool fine, const char* rule) {
  if (!fine) PyErr_SetString(PyExc_ValueError, rule);
  return fine;
}

bool check_count(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, given);
  return given == wanted;
}

// `wanted` arguments, the last of which is a truth value and may be left out: false.
bool parse_last_truth(PyObject* const* args, Py_ssize_t given, Py_ssize_t wanted, bool& value) {
  value = false;
  if (given == wanted - 1) return true;
  if (!check_count(given, wanted)) return false;
  const int truth = PyObject_IsTrue(args[wanted - 1]);
  value = truth > 0;
  return truth >= 0;
}

bool parse(PyObject* argument, uint32_t most, const char* rule, uint32_t& value) {
  const long number = PyLong_AsLong(argument);
  if (number == -1 && PyErr_Occurred()) return false;
  value = static_cast<uint32_t>(number);
  return check(number >= 0 && number <= static_cast<long>(most), rule);
}

struct Object {
  PyObject_HEAD
  baton::PageTable* table;
};

baton::PageTable& table_of(PyObject* self) { return *reinterpret_cast<Object*>(self)->table; }

bool parse_slot(PyObject* argument, baton::Slot& slot) {
  return parse(argument, baton::kMaxSlot, "a slot is a number from 0 to 2**27 - 1", slot);
}

bool parse_slot_and_tiers(PyObject* const* args, Py_ssize_t given, baton::Slot& slot, baton::Tiers& tiers) {
  if (!check_count(given, 2) || !parse_slot(args[0], slot)) return false;
  return parse(args[1], baton::kAllTiers, "a mask of tiers is a number from 0 to 15", tiers);
}

bool check_hashes(const Buffer& hashes) {
  return hashes && check(hashes->ndim == 1 && hashes->itemsize == 8, "hashes are int64, in one dimension");
}

using Write = void (baton::PageTable::*)(baton::Slot, baton::Tiers, const uint64_t*, size_t);

PyObject* write(PyObject* self, PyObject* const* args, baton::Tiers mark, Write change) {
  baton::Slot slot;
  uint32_t tier;
  if (!parse_slot(args[0], slot)) return nullptr;
  if (!parse(args[1], baton::kTiers - 1, "a tier is a number from 0 to 3", tier)) return nullptr;
  const Buffer hashes(args[2], PyBUF_ND);
  if (!check_hashes(hashes)) return nullptr;
  return guarded([&] {
    (table_of(self).*change)(slot, 1u << tier | mark, static_cast<const uint64_t*>(hashes->buf), hashes->shape[0]);
    return Py_None;
  });
}

PyObject* store(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  bool is_private;
  if (!parse_last_truth(args, given, 4, is_private)) return nullptr;
  return Py_XNewRef(write(self, args, is_private ? baton::kPrivate : 0, &baton::PageTable::store));
}

PyObject* remove(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  if (!check_count(given, 3)) return nullptr;
  return Py_XNewRef(write(self, args, 0, &baton::PageTable::remove));
}

PyObject* clear(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  baton::Slot slot;
  baton::Tiers tiers;
  if (!parse_slot_and_tiers(args, given, slot, tiers)) return nullptr;
  return Py_XNewRef(guarded([&] {
    const WithoutGil released;
    table_of(self).clear(slot, tiers);
    return Py_None;
  }));
}

PyObject* clear_told(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  baton::Slot slot;
  bool is_private;
  if (!parse_last_truth(args, given, 2, is_private) || !parse_slot(args[0], slot)) return nullptr;
  return Py_XNewRef(guarded([&] {
    const WithoutGil released;
    table_of(self).clear_told(slot, is_private);
    return Py_None;
  }));
}

PyObject* apply(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  baton::Slot slot;
  bool is_private;
  if (!parse_last_truth(args, given, 3, is_private) || !parse_slot(args[0], slot)) return nullptr;
  const Buffer payload(args[1], PyBUF_SIMPLE);
  if (!payload) return nullptr;
  return guarded([&] {
    int64_t events;
    {
      const WithoutGil released;
      events = table_of(self).apply(slot, static_cast<const uint8_t*>(payload->buf), payload->len, is_private);
    }
    return PyLong_FromLongLong(events);
  });
}

PyObject* find(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  if (!check_count(given, 2)) return nullptr;
  const Buffer hashes(args[0], PyBUF_ND);
  if (!check_hashes(hashes)) return nullptr;
  const Buffer found(args[1], PyBUF_ND | PyBUF_WRITABLE);
  if (!found) return nullptr;
  const bool rows = found->ndim == 2 && found->itemsize == 4 && found->shape[0] == baton::kTiers;
  if (!check(rows, "found is int32 [4, slots]")) return nullptr;
  return Py_XNewRef(guarded([&] {
    table_of(self).find(static_cast<const uint64_t*>(hashes->buf), hashes->shape[0],
                        static_cast<int32_t*>(found->buf), found->shape[1]);
    return Py_None;
  }));
}

PyObject* held(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  baton::Slot slot;
  baton::Tiers tiers;
  if (!parse_slot_and_tiers(args, given, slot, tiers)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> pages;
    {
      const WithoutGil released;
      pages = table_of(self).held(slot, tiers);
    }
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(pages.size()));
    for (size_t i = 0; list && i < pages.size(); ++i) {
      PyObject* page = PyLong_FromLongLong(pages[i]);
      if (!page) Py_CLEAR(list);
      else PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), page);
    }
    return list;
  });
}

PyObject* nbytes(PyObject* self, PyObject*) { return PyLong_FromSize_t(table_of(self).nbytes()); }

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(table_of(self).size()); }

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  PyObject* made = guarded([&] {
    std::random_device random;
    const uint64_t seed = uint64_t{random()} << 32 | random();
    reinterpret_cast<Object*>(self)->table = new baton::PageTable(seed);
    return self;
  });
  if (!made) Py_DECREF(self);
  return made;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->table;
  type->tp_free(self);
  Py_DECREF(type);
}

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}
PyMethodDef methods[] = {
    FAST(store), FAST(remove), FAST(clear), FAST(clear_told), FAST(apply), FAST(find), FAST(held),
    {"nbytes", nbytes, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
#undef FAST

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {0, nullptr},
};

PyType_Spec type_spec = {"baton_router.PageTable", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, type_slots};

int fill(PyObject* module) {
  PyObject* type = PyType_FromSpec(&type_spec);
  if (!type) return -1;
  const int added = PyModule_AddObjectRef(module, "PageTable", type);
  Py_DECREF(type);
  return added;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "baton_router", nullptr, 0, nullptr, module_slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_baton_router() { return PyModuleDef_Init(&definition); }
