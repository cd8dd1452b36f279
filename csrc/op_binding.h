// How the arguments of an op get from Python into its struct: the fields that `given` lists (ops.h), one by one.
// While the calling thread records a program the op is added to it instead of being run; an op that is not of a forward
// pass then refuses. Knows: nanobind, addresses. Does not know which ops there are (bindings.cpp).
#pragma once

#include <nanobind/nanobind.h>

#include <tuple>
#include <type_traits>

#include "cpu_engine.h"
#include "program.h"

namespace forerun {

namespace nb = nanobind;

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Multiply-adds above which an op releases the GIL; releasing it costs more than a short op.
constexpr int64_t kLongOp = 1 << 21;

template <class Call>
void call(int64_t work, Call body) {
    if (work < kLongOp) return body();
    const nb::gil_scoped_release released;
    body();
}

// What Python gives for a field: an address for a pointer, a number for an enum, a bound object for the like.
template <class Field>
struct Given {
    using Type = std::conditional_t<std::is_enum_v<Field>, int, Field>;
};
template <class T>
struct Given<T*> {
    using Type = Address;
};
template <>
struct Given<const ExpertBank*> {
    using Type = const ExpertBank*;
};

template <class Field>
void set(Field& field, const typename Given<Field>::Type& given) {
    if constexpr (std::is_pointer_v<Field> && !std::is_pointer_v<typename Given<Field>::Type>) {
        field = reinterpret_cast<Field>(given);
    } else {
        field = static_cast<Field>(given);
    }
}

template <class... Fields>
struct FieldTypes {
    using Values = std::tuple<typename Given<Fields>::Type...>;
};
struct ListTypes {
    template <class... Fields>
    FieldTypes<Fields...> operator()(Fields&...) const {
        return {};
    }
};
// The types of the fields that are given for Args.
template <class Args>
using FieldsOf = decltype(std::declval<Args&>().given(ListTypes{}));

template <class Args, class... Values>
Args make(const Values&... values) {
    Args args{};
    args.given([&](auto&... fields) { (set(fields, values), ...); });
    return args;
}

// An op of a forward pass: run, unless this thread is recording a program.
template <class Args, class... Fields>
void bind_fields(nb::class_<CpuEngine>& engine, const char* name, void (CpuEngine::*op)(const Args&), bool recorded,
                 FieldTypes<Fields...>) {
    engine.def(name, [name, op, recorded](CpuEngine& self, typename Given<Fields>::Type... values) {
        if (!recorded) Program::refuse(name);
        const Args args = make<Args>(values...);
        if (Program* program = Program::recording()) return program->add(args, op);
        call(args.work(), [&] { (self.*op)(args); });
    });
}

// recorded: false for an op that no program can hold.
template <class Args>
void bind_op(nb::class_<CpuEngine>& engine, const char* name, void (CpuEngine::*op)(const Args&), bool recorded = true) {
    bind_fields(engine, name, op, recorded, FieldsOf<Args>{});
}

}  // namespace forerun
