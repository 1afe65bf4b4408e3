// The Python face of WordTable: the class `baton_router.WordTable`, as router/text/word_cache.py describes it.
#include "python_face.h"

#include "word_table.h"

namespace {

using baton::Alternative;
using baton::check;
using baton::check_count;
using baton::guarded;
using baton::Raised;
using baton::Steps;
using baton::WordTable;

// Python's ints of the ids that were seen, made once: to make and free hundreds a prompt took half of the time.
class Numbers {
 public:
  Numbers() = default;
  Numbers(const Numbers&) = delete;
  ~Numbers() {
    for (PyObject* one : made_) Py_XDECREF(one);
  }

  // A new reference, or nullptr.
  PyObject* operator()(uint32_t id) {
    if (id >= made_.size()) made_.resize(id + 1);
    if (!made_[id]) made_[id] = PyLong_FromUnsignedLong(id);
    return Py_XNewRef(made_[id]);
  }

  PyObject* list(const WordTable::Ids& ids) {
    PyObject* made = PyList_New(static_cast<Py_ssize_t>(ids.size()));
    for (size_t i = 0; made && i < ids.size(); ++i) {
      PyObject* id = (*this)(ids[i]);
      if (id)
        PyList_SET_ITEM(made, static_cast<Py_ssize_t>(i), id);
      else
        Py_CLEAR(made);
    }
    return made;
  }

 private:
  std::vector<PyObject*> made_;
};

struct State {
  WordTable table;
  Numbers numbers;
};

struct Object {
  PyObject_HEAD
  State* state;
};

// Calls `take` with each item of a Python list. Throws Raised for what is no list.
template <typename Take>
void each(PyObject* list, Take take) {
  if (!check(PyList_Check(list), "a list is needed")) throw Raised();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) take(PyList_GET_ITEM(list, i));
}

Steps read_steps(PyObject* list) {
  Steps steps;
  each(list, [&](PyObject* item) {
    unsigned long long low, high;
    baton::Step step;
    if (!PyArg_ParseTuple(item, "KKII", &low, &high, &step.least, &step.most)) throw Raised();
    step.members[0] = low, step.members[1] = high;
    steps.push_back(step);
  });
  return steps;
}

std::vector<Alternative> read_alternatives(PyObject* list) {
  std::vector<Alternative> alternatives;
  each(list, [&](PyObject* item) {
    PyObject *steps, *endings;
    if (!PyArg_ParseTuple(item, "OO", &steps, &endings)) throw Raised();
    Alternative made{read_steps(steps), {}};
    each(endings, [&](PyObject* ending) { made.endings.push_back(read_steps(ending)); });
    alternatives.push_back(std::move(made));
  });
  return alternatives;
}

// Asks Python for the ids of a word.
WordTable::Ids ask(PyObject* learn, const std::string& word) {
  PyObject* said = PyObject_CallFunction(learn, "s#", word.data(), static_cast<Py_ssize_t>(word.size()));
  if (!said) throw Raised();
  WordTable::Ids ids;
  try {
    each(said, [&](PyObject* item) {
      const unsigned long id = PyLong_AsUnsignedLong(item);
      if (PyErr_Occurred() || !check(id <= UINT32_MAX, "a token id is too large")) throw Raised();
      ids.push_back(static_cast<uint32_t>(id));
    });
  } catch (...) {
    Py_DECREF(said);
    throw;
  }
  Py_DECREF(said);
  return ids;
}

// encode(text, learn) -> list of ids, or None. Under the GIL throughout, and `learn` must not come back here.
PyObject* encode(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  if (!check_count(given, 2)) return nullptr;
  const bool ascii = PyUnicode_Check(args[0]) && PyUnicode_IS_ASCII(args[0]);
  if (!check(ascii, "the text is not ASCII")) return nullptr;
  const char* const text = static_cast<const char*>(PyUnicode_DATA(args[0]));
  const std::string_view view(text, static_cast<size_t>(PyUnicode_GET_LENGTH(args[0])));
  return guarded([&]() -> PyObject* {
    WordTable::Ids ids;
    ids.reserve(view.size() / 3 + 8);
    const auto learn = [&](const std::string& word) { return ask(args[1], word); };
    State& state = *reinterpret_cast<Object*>(self)->state;
    if (!state.table.encode(view, ids, learn)) return Py_NewRef(Py_None);
    return state.numbers.list(ids);
  });
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* alternatives;
  Py_ssize_t most_words, longest_word;
  if (!PyArg_ParseTuple(args, "Onn", &alternatives, &most_words, &longest_word)) return nullptr;
  if (!check(most_words > 0 && longest_word >= 0, "no word could be kept")) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  PyObject* made = guarded([&] {
    reinterpret_cast<Object*>(self)->state =
        new State{WordTable(read_alternatives(alternatives), most_words, longest_word), Numbers()};
    return self;
  });
  if (!made) Py_DECREF(self);
  return made;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"encode", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(encode)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec type_spec = {"baton_router.WordTable", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, type_slots};

}  // namespace

PyObject* make_word_table_type() { return PyType_FromSpec(&type_spec); }
