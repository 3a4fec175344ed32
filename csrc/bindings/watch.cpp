// Watch: finds at every boundary which of the state's tensors have changed their place since the plan.
#include "bindings/places.h"
#include "bindings/tensors.h"

#include <optional>
#include <utility>

namespace flashckpt {
namespace {

struct Item {
    std::optional<Place> place; // without a place only the tensor is watched
    Held tensor;
    Look look;

    void prefetch() const {
        if (place) __builtin_prefetch(place->container().ptr());
        __builtin_prefetch(tensor.ptr());
        look.prefetch();
    }
};

// After a step none of this is cached, and checking a tensor waits for several cache lines in turn, so lines
// of the next tensors are prefetched.
constexpr std::size_t kAhead = 8;

class Busy {
  public:
    explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
    ~Busy() { flag_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

  private:
    bool& flag_;
};

class Watch {
  public:
    Watch(nb::handle items, nb::handle tensors);
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    nb::list changed(nb::handle addresses_out);
    void release();
    bool try_release() noexcept; // false during a call of `changed`
    std::size_t size() const { return items_.size(); }

    int traverse(visitproc visit, void* arg) const {
        for (const Item& item : items_) {
            Py_VISIT(item.tensor.ptr());
            if (!item.place) continue;
            if (int result = item.place->traverse(visit, arg); result != 0) return result;
        }
        return 0;
    }

  private:
    bool holds(const Item& item, std::uint64_t& address) const;

    std::vector<Item> items_;
    bool busy_ = false; // reading a property may run any code, also this watch's methods
};

Held sequence_of(nb::handle object, const char* message) {
    Held sequence = Held::steal(into_python([=] { return PySequence_Fast(object.ptr(), message); }));
    if (!sequence) throw nb::python_error();
    return sequence;
}

Watch::Watch(nb::handle items, nb::handle tensors) {
    Held pairs = sequence_of(items, "items must be a list of (container, key)");
    Held all = sequence_of(tensors, "tensors must be a list");
    Py_ssize_t count = PySequence_Fast_GET_SIZE(pairs.ptr());
    if (PySequence_Fast_GET_SIZE(all.ptr()) != count) raise_value("items and tensors differ in length");
    items_.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* pair = PySequence_Fast_GET_ITEM(pairs.ptr(), i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            raise_value("an item must be (container, key)");
        Item item;
        nb::handle container = PyTuple_GET_ITEM(pair, 0);
        if (!container.is_none()) item.place = Place::stored(container, PyTuple_GET_ITEM(pair, 1));
        item.tensor = Held::borrow(PySequence_Fast_GET_ITEM(all.ptr(), i));
        item.look = Look::at(item.tensor.ptr());
        items_.push_back(std::move(item));
    }
}

bool Watch::holds(const Item& item, std::uint64_t& address) const {
    Held now = item.place ? item.place->current() : Held::borrow(item.tensor.ptr());
    if (!now) {
        forgive(); // a missing object is a result, not an error
        return false;
    }
    if (now.ptr() == item.tensor.ptr()) return item.look.holds(now.ptr(), address);
    if (now.ptr() != Py_None) address = Look::at(now.ptr()).address();
    return false;
}

nb::list Watch::changed(nb::handle addresses_out) {
    U64View out(addresses_out, true);
    if (out.size() < items_.size()) raise_value("addresses_out is shorter than the list of items");
    if (busy_) raise_value("this watch is being asked already");
    Busy busy(busy_);
    nb::list indexes = nb::steal<nb::list>(into_python([] { return PyList_New(0); }));
    if (!indexes.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < items_.size(); ++i) {
        if (i + kAhead < items_.size()) items_[i + kAhead].prefetch();
        std::uint64_t address = 0;
        bool same = holds(items_[i], address);
        out.data()[i] = address;
        if (!same) indexes.append(i);
    }
    return indexes;
}

void Watch::release() {
    if (!try_release()) raise_value("this watch is being asked");
}

bool Watch::try_release() noexcept {
    if (busy_) return false;
    // Move the items away first: releasing the last reference to a tensor may run code that calls this watch.
    std::vector<Item> dropped = std::exchange(items_, {});
    return true;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Watch>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
    // Keep a watch that is in use, whatever the garbage collector has found. Nothing may be thrown here.
    if (nb::inst_ready(self)) nb::inst_ptr<Watch>(self)->try_release();
    return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

} // namespace

void bind_watch(nb::module_& module) {
    nb::class_<Watch>(module, "Watch", nb::type_slots(slots))
        .def(nb::init<nb::handle, nb::handle>(), nb::arg("items"), nb::arg("tensors"))
        .def("changed", &Watch::changed, nb::arg("addresses_out"))
        .def("release", &Watch::release)
        .def("__len__", &Watch::size);
}

} // namespace flashckpt
