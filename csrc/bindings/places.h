// Where an object of the state stands: `container[key]`, or an attribute of that name. Owns how a place is
// asked without changing it, as a defaultdict's own item access would.
#pragma once

#include "bindings/arguments.h"

namespace flashckpt {

enum class Access { dict, list, attribute, item };

class Place {
  public:
    // Of a dict or a list what it holds is read, whatever a subclass's own item access would do or give.
    static Place stored(nb::handle container, nb::handle key);
    // As Python's item access; an absent key is absent, though: `__missing__` is not asked.
    static Place asked(nb::handle container, nb::handle key);

    // What stands there now; not valid, perhaps with a Python error, if nothing does.
    Held current() const;

    Access access() const { return access_; }
    nb::handle container() const { return container_.ptr(); }
    nb::handle key() const { return key_.ptr(); }

    int traverse(visitproc visit, void* arg) const {
        Py_VISIT(container_.ptr());
        Py_VISIT(key_.ptr());
        return 0;
    }

  private:
    Place(nb::handle container, nb::handle key, Access access);

    Held container_;
    Held key_;
    Access access_;
    Py_ssize_t index_ = 0;
};

} // namespace flashckpt
