// The Python face of KVPrices: the class `baton_router.KVPrices`, as router/placement/kv_policy.py describes it.
#include "python_face.h"

#include "kv_prices.h"

namespace {

using baton::Buffer;
using baton::Chosen;
using baton::check;
using baton::check_count;
using baton::guarded;

struct Object {
  PyObject_HEAD
  baton::KVPrices* prices;
};

// One side's four arguments.
class SideBuffers {
 public:
  static constexpr Py_ssize_t kArguments = 4;

  explicit SideBuffers(PyObject* const* args)
      : figures_(args[0], PyBUF_STRIDES), slots_(args[1], PyBUF_ND), hosts_(args[2], PyBUF_ND), last_(args[3]) {}

  // False, with Python's error set, for what is not one side of `found`.
  bool read(size_t found, baton::Side& side) const {
    if (!figures_ || !slots_ || !hosts_) return false;
    const bool floats = figures_->ndim == 2 && figures_->itemsize == 8 && figures_->shape[0] == 4 &&
                        (figures_->shape[1] < 2 || figures_->strides[1] == 8);
    if (!check(floats, "figures are float64 [4, workers], each row in one piece")) return false;
    const Py_ssize_t workers = figures_->shape[1];
    for (const Buffer* one : {&slots_, &hosts_}) {
      const bool integers = (*one)->ndim == 1 && (*one)->itemsize == 8 && (*one)->shape[0] == workers;
      if (!check(integers, "slots and hosts are int64, one of each worker")) return false;
    }
    side.workers = workers;
    const double** const rows[] = {&side.queued, &side.requests, &side.context, &side.capacity};
    for (int i = 0; i < 4; ++i)
      *rows[i] = reinterpret_cast<const double*>(static_cast<const char*>(figures_->buf) + i * figures_->strides[0]);
    side.slots = static_cast<const int64_t*>(slots_->buf);
    side.hosts = static_cast<const int64_t*>(hosts_->buf);
    for (Py_ssize_t row = 0; row < workers; ++row)
      if (!check(static_cast<uint64_t>(side.slots[row]) < found && side.hosts[row] >= 0, "a worker has no slot or host"))
        return false;
    side.last = last_ == Py_None ? -1 : PyLong_AsLongLong(last_);
    return !PyErr_Occurred() && check(side.last >= -1 && side.last < workers, "`last` is no row");
  }

 private:
  const Buffer figures_, slots_, hosts_;
  PyObject* const last_;
};

size_t draw(PyObject* chance, size_t equals) {
  PyObject* drawn = PyObject_CallFunction(chance, "n", static_cast<Py_ssize_t>(equals));
  if (!drawn) throw baton::Raised();
  const size_t turn = PyLong_AsSize_t(drawn);
  Py_DECREF(drawn);
  if (PyErr_Occurred() || !check(turn < equals, "what was drawn is too much")) throw baton::Raised();
  return turn;
}

PyObject* pick(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  constexpr Py_ssize_t kWanted = 4, kSides = kWanted + 2 * SideBuffers::kArguments;
  if (!check_count(given, kSides + 1)) return nullptr;
  baton::Wanted wanted{PyFloat_AsDouble(args[0]), PyFloat_AsDouble(args[1]), PyFloat_AsDouble(args[2]), nullptr, 0};
  if (PyErr_Occurred()) return nullptr;
  const Buffer found(args[3], PyBUF_ND);
  if (!found) return nullptr;
  const bool rows = found->ndim == 2 && found->itemsize == 4 && found->shape[0] == 4;
  if (!check(rows, "found is int32 [4, slots]")) return nullptr;
  wanted.found = static_cast<const int32_t*>(found->buf);
  wanted.slots = found->shape[1];
  const SideBuffers prefills(args + kWanted), decodes(args + kWanted + SideBuffers::kArguments);
  baton::Side prefill, decode;
  if (!prefills.read(wanted.slots, prefill) || !decodes.read(wanted.slots, decode)) return nullptr;
  if (!check(decode.workers > 0, "there is no decode worker")) return nullptr;
  return guarded([&] {
    const auto by_chance = [&](size_t equals) { return draw(args[kSides], equals); };
    baton::KVPrices& prices = *reinterpret_cast<Object*>(self)->prices;
    const Chosen chosen = prices.pick(wanted, prefill, decode, by_chance);
    if (chosen.prefill == Chosen::kNobody) return Py_BuildValue("nO", chosen.decode, Py_None);
    return Py_BuildValue("nn", chosen.decode, chosen.prefill);
  });
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {
      "prefill_queue", "queue_objective", "prefill_left", "transfer", "same_host", "decode_load", "decode_context",
      "decode_full", "decode_prefill", "session", "credits", "alone_tokens", nullptr,
  };
  baton::Weights w;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "$dddddddddd(ddd)d", const_cast<char**>(names), &w.prefill_queue, &w.queue_objective,
          &w.prefill_left, &w.transfer, &w.same_host, &w.decode_load, &w.decode_context, &w.decode_full,
          &w.decode_prefill, &w.session, &w.credits[0], &w.credits[1], &w.credits[2], &w.alone_tokens))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  PyObject* made = guarded([&] {
    reinterpret_cast<Object*>(self)->prices = new baton::KVPrices(w);
    return self;
  });
  if (!made) Py_DECREF(self);
  return made;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->prices;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"pick", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pick)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec type_spec = {"baton_router.KVPrices", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, type_slots};

}  // namespace

PyObject* make_kv_prices_type() { return PyType_FromSpec(&type_spec); }
