# Prints every stack of a PostgreSQL process, what it waits for and which LWLocks it holds.
#
#   gdb -batch -x dev/outbox.gdb -p PID
#   gdb -batch -x dev/outbox.gdb PROGRAM CORE
#
# The stacks come first: what follows needs the server's debugging symbols.

set pagination off
set print pretty on
set print frame-arguments all
set print elements 200

echo \n== process\n
info inferiors
echo \n== stacks\n
thread apply all backtrace full

echo \n== query and wait event\n
print debug_query_string
print/x *my_wait_event_info
echo \n== interrupts\n
print InterruptPending
print InterruptHoldoffCount
print CritSectionCount
echo \n== LWLocks held\n
print num_held_lwlocks
set $i = 0
while $i < num_held_lwlocks
	print *held_lwlocks[$i].lock
	print held_lwlocks[$i].mode
	set $i = $i + 1
end
