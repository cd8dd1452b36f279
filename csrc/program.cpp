#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace forerun {

namespace {

thread_local Program* recording_program = nullptr;

}  // namespace

void Program::record() {
    if (recording_program) throw NotRecordable("this thread records a program already");
    recording_program = this;
}

void Program::stop() {
    if (recording_program == this) recording_program = nullptr;
}

Program* Program::recording() { return recording_program; }

void Program::refuse(const char* op) {
    if (recording_program) throw NotRecordable(std::string(op) + " cannot be recorded");
}

void Program::bind(int64_t slot, uintptr_t recorded, int64_t first_step) {
    num_slots_ = std::max(num_slots_, static_cast<size_t>(slot) + 1);
    for (size_t step = static_cast<size_t>(first_step); step < steps_.size(); ++step) {
        for (void* where : steps_[step]->fields.addresses) {
            uintptr_t address;
            std::memcpy(&address, where, sizeof address);
            if (address == recorded) patches_.push_back({where, static_cast<size_t>(slot)});
        }
    }
}

void Program::finish(int64_t recorded_rows, int64_t recorded_logit_rows) {
    for (const std::unique_ptr<Step>& step : steps_) {
        const Fields& fields = step->fields;
        if (*fields.rows != recorded_rows && *fields.rows != recorded_logit_rows) {
            throw NotRecordable("an op over " + std::to_string(*fields.rows) + " rows cannot be replayed");
        }
        (*fields.rows == recorded_rows ? rows_ : logit_rows_).push_back(fields.rows);
        if (fields.max_blocks) max_blocks_.push_back(fields.max_blocks);
        if (fields.max_visible) max_visible_.push_back(fields.max_visible);
    }
}

void Program::run(const std::vector<uintptr_t>& addresses, const RunSizes& sizes) {
    if (addresses.size() < num_slots_) throw std::invalid_argument("too few addresses for this program");
    for (const Patch& patch : patches_) std::memcpy(patch.where, &addresses[patch.slot], sizeof(uintptr_t));
    for (int64_t* where : rows_) *where = sizes.rows;
    for (int64_t* where : logit_rows_) *where = sizes.logit_rows;
    for (int64_t* where : max_blocks_) *where = sizes.max_blocks;
    for (int64_t* where : max_visible_) *where = sizes.max_visible;
    for (const std::unique_ptr<Step>& step : steps_) step->run(engine_);
}

}  // namespace forerun
