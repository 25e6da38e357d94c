# The server has a user of its own: it needs no right of root's.

id -u nxpipe > /dev/null 2>&1 || useradd --system --no-create-home --shell /usr/sbin/nologin nxpipe
systemctl daemon-reload
systemctl enable --now --no-block nxpipe-logs.service
systemctl enable --now --no-block nxpipe-watch.service
systemctl enable --now nxpipe-agent.service || { # until the server is in service
    code=$?
    if [ -e "$GIVEN_UP" ]; then exit "$code"; fi # the agent has written why, and has abandoned the instance
    fail "systemd has not started nxpipe-agent.service; see its journal in this log group" "$code"
}
